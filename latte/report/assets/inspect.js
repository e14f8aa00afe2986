'use strict';
/* The page of `latte inspect`: the inspector alone. */
Latte.themeButton(document.querySelector('.theme'));
Latte.inspector(document.getElementById('page').appendChild(Latte.el('section', { id: 'inspector', 'aria-label': 'Inspector' })), Latte.data('data'));
